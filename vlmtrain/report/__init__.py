"""After a run: one self-contained HTML file about it."""
