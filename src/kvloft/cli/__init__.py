"""The ``kvloft`` command: one module per subcommand, loaded only when it is the one asked for."""
