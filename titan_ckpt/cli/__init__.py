"""The commands of the core, one module each, and the table of all commands in `main`. No torch unless a command needs it."""
