"""Tokenizers, and chats by the template of a tokenizer."""
