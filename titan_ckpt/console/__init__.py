"""Text, tables, JSON and the progress line of the commands; imports nothing above `errors` and `location`."""
