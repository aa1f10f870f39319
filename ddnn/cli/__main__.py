"""`python -m ddnn.cli`."""

from ddnn.cli.main import main

if __name__ == "__main__":
    main()
