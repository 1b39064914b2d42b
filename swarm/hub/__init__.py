"""Models by name: lookup at a Hugging Face hub, and download file by file."""
