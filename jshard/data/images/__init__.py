"""Images from folders and array records."""
