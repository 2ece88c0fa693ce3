"""How good a model is: loss on held-out conversations, scores on questions with known answers."""
