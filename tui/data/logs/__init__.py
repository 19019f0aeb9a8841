"""Log files on the screens: indexed by line and time, filtered, searched, followed as they grow."""
