"""`make demo`: real photographs, a small Qwen2.5-VL, trained here and asked in transformers."""
