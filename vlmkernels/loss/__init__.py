"""The last layer and its loss without logits in memory."""
