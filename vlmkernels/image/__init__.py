"""From decoded frames to patch rows: bicubic resize, then rescale, normalise, cast and gather."""
