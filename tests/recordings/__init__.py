"""Recordings: what each kind of save and restore asks of the file system, operation by operation.

A recording is a text file in tests/data/recordings/. test_recordings.py compares each with what
happens now, and `python -m tests.recordings --write` writes them anew: a change of an order is then
seen in the diff of the commit that makes it.

- recorder.py: the storage double that records, and the text of a recording.
- scenes.py: what is saved and restored, by which ranks, and what is wrong meanwhile.
- stage.py: a scene played by one process, or by forked ranks.
"""
