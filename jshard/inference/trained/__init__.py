"""Trained models to use: from runs, and from the folders of Hugging Face."""
