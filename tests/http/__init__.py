"""Protocol tests over real sockets: each test checks one rule."""  # noqa: A005
