#ifndef SWARM_TILES_HERE_H
#define SWARM_TILES_HERE_H

/*
 * Why this process may not use tiles (AMX): NULL if it may, "" if the processor has none. Asks the system for its
 * leave, once, for all threads.
 */
const char *swarm_tiles_refused(void);

#endif
