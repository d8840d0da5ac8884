"""What a profile shows beside what was planned: read, aligned, explained."""
