"""A package, so that its fixtures end with it: while Playwright's loop goes, no other test here can have one."""
