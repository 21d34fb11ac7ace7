"""`python -m gradlane` is the command `gradlane`."""

from gradlane.cli import main

main(prog_name="gradlane")
