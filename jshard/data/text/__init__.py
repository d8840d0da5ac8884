"""Text and token files as windows of tokens or packed documents."""
