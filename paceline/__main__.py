"""`python -m paceline`: the command line without its installed script."""

from paceline.cli import main

main()
