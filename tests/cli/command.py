"""One call of the command line."""

from gumbeljax.__main__ import main


def call(capsys, *arguments):
    """Exit code, standard output and standard error of one call."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err
