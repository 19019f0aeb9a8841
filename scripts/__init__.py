"""Programs for developers: campaigns, the demo, and writers of documentation and golden files."""
