"""Word embedding and visual rows in one pass, and who needs which visual row."""
