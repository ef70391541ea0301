"""One script for each claim about speed: it checks the law before it times, and writes results/<name>.json."""
