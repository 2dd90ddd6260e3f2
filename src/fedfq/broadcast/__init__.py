"""The way down: the server's model to its clients, at a hundredth of its size, the same bits for all.

The server keeps the true model w. Clients hold an approximation of it: an anchor, the model of an earlier version that
they all have or can get, plus what a payload says of w minus the anchor. What a payload leaves out is in the next one
again, so that errors do not add up. Now and then, what was sent becomes the next anchor.

A client that was away for any number of rounds needs the payloads that became anchors since, and the newest one.
"""
