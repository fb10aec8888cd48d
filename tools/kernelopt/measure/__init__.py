"""What a kernel does and how long it takes: verification, paired timing, the rates of a card.

May import: device, session, hardware and below. Next: a verdict over results goes to correctness.py, verdict.py or
pairing.py, a reason not to believe times to raw_times.py: these are pure. A measurement is a module here."""
