"""Names on the Hugging Face Hub, and what they stand for as local files."""
