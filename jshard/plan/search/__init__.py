"""The search for settings that no other beats."""
