"""Other people's clients against a server that runs: what is too large to be a dependency of the tests."""
