/* Prints what the library's own proof says of each variant that runs here: its name, and what is wrong with it. */
#include <stdio.h>

extern const char *swarm_variant(int index, int *runs_here);
extern const char *swarm_proof(const char *name);

int main(void) {
  const char *name;
  int runs_here;
  for (int index = 0; (name = swarm_variant(index, &runs_here)) != NULL; index++) {
    const char *wrong = runs_here ? swarm_proof(name) : "does not run here";
    printf("%s: %s\n", name, wrong == NULL ? "right" : wrong);
  }
  return 0;
}
