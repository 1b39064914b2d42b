/* A task that keeps a process's memory until the process is gone, so that its end shows at once. */
#ifndef SWARM_KEEPER_H
#define SWARM_KEEPER_H

/*
 * Begin to keep the caller's memory. Returns the keeper's process number, a child that sends no signal at its end (wait
 * for it with __WALL), or an error's negative number; -ENOSYS where there can be none.
 *
 * The keeper ends by itself soon after the last thread of the calling process has ended. To end it earlier, kill it.
 */
int swarm_keeper_start(void);

#endif
