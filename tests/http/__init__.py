"""The protocol from outside: each test states a rule and proves it over real sockets."""  # noqa: A005
