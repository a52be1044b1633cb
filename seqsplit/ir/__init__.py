"""What passes make and the runtime executes: plans, and the placements they are written in."""
