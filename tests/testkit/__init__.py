"""What the tests share: models, pools of ranks, programs, cases, and which test belongs to which tier."""
