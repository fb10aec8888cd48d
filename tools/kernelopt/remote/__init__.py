"""Work on another machine: what travels there, how it runs in a mirror of the client's files, what comes home.

May import: device, session and below.
Next: what else may travel goes to session/trees.py; another way to reach a node replaces connection.py, whose Node has
one method, `run`.

hand_over.py is the client's part, there.py the node's; nodes.py starts and checks a node. parcels.py holds the same
files for machines without a connection.
"""
