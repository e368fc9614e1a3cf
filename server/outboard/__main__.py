from outboard.cli import main

main()
