"""Adapters for other libraries; each imports its library on demand."""
