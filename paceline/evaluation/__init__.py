"""What is measured of speculative sampling: tasks with their scores, and what generated programs are run in."""
