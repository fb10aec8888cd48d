"""What a kernel does and how long it takes: verification, paired timing, the rates of a card.

May import: device, session, hardware and below. Next: a verdict over results goes to correctness.py, verdict.py or
pairing.py, which are pure; a measurement is a module here."""
