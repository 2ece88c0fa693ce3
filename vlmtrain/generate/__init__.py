"""Answers of a trained model: by transformers, with our kernels, on this project's own inputs."""
