// The driver's own calls on another process, by hand: what sublet's times are compared with. One JSON line.
//   checkpoint suspend|resume PID
//   checkpoint move PID UUID UUID [UUID UUID]...     each GPU that it can open, followed by the one that takes its place
//   checkpoint restore PID UUID UUID [UUID UUID]...  the second half of that, for a process that is suspended
// Build: cc -O2 -o checkpoint checkpoint.c (no CUDA is needed: it opens libcuda.so.1, which has the calls since CUDA 12.8)
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// Those of cuda.h: CUcheckpointLockArgs, CUcheckpointGpuPair, CUcheckpointRestoreArgs.
struct lock_args {
  unsigned timeout_ms, reserved0;
  uint64_t reserved1[7];
};
struct pair {
  unsigned char from[16], to[16];
};
struct restore_args {
  struct pair *pairs;
  unsigned count;
  char reserved[44];
  uint64_t reserved1;
};

enum { MOST_GPUS = 16, LOCK_MS = 10000 };

typedef int call(int pid, void *args);
static void *cuda;

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

// Makes one call, adds the time that it took to `took`, and ends the program if it fails.
static void make(const char *name, int pid, void *args, double *took) {
  call *function = (call *)dlsym(cuda, name);
  double began = seconds();
  int result = function ? function(pid, args) : -1;
  *took += seconds() - began;
  if (result) {
    printf("{\"failed\": \"%s\", \"result\": %d}\n", name, result);
    exit(1);
  }
}

static int parse(const char *text, unsigned char uuid[16]) {
  int digits = 0;
  memset(uuid, 0, 16);
  for (text += strncmp(text, "GPU-", 4) ? 0 : 4; *text; text++) {
    if (*text == '-') continue;
    int digit = *text <= '9' ? *text - '0' : (*text | 32) - 'a' + 10;
    if (digit < 0 || digit > 15 || digits == 32) return 0;
    uuid[digits / 2] |= (unsigned char)(digits % 2 ? digit : digit << 4);
    digits++;
  }
  return digits == 32;
}

int main(int count, char **words) {
  struct pair pairs[MOST_GPUS];
  struct lock_args lock = {.timeout_ms = LOCK_MS};
  struct restore_args restore = {0};
  double out = 0, back = 0;
  const char *what = count > 2 ? words[1] : "";
  int restores = !strcmp(what, "restore"), moves = restores || !strcmp(what, "move");
  int suspends = (moves && !restores) || !strcmp(what, "suspend"), resumes = moves || !strcmp(what, "resume");
  int given = (count - 3) / 2;
  if (!(suspends || resumes) || (moves ? given < 1 || given > MOST_GPUS || count % 2 == 0 : count != 3)) {
    fprintf(stderr, "usage: checkpoint suspend|resume PID, or move|restore PID UUID UUID...\n");
    return 2;
  }
  for (int i = 0; moves && i < given; i++) {
    if (!parse(words[3 + 2 * i], pairs[i].from) || !parse(words[4 + 2 * i], pairs[i].to)) {
      fprintf(stderr, "checkpoint: no UUID: %s %s\n", words[3 + 2 * i], words[4 + 2 * i]);
      return 2;
    }
  }
  if (!(cuda = dlopen("libcuda.so.1", RTLD_NOW))) {
    fprintf(stderr, "checkpoint: %s\n", dlerror());
    return 2;
  }
  int pid = atoi(words[2]);
  if (suspends) {
    make("cuCheckpointProcessLock", pid, &lock, &out);
    make("cuCheckpointProcessCheckpoint", pid, NULL, &out);
  }
  if (resumes) {
    restore.pairs = moves ? pairs : NULL;
    restore.count = moves ? (unsigned)given : 0;
    make("cuCheckpointProcessRestore", pid, moves ? &restore : NULL, &back);
    make("cuCheckpointProcessUnlock", pid, NULL, &back);
  }
  printf("{\"out_s\": %.4f, \"back_s\": %.4f}\n", out, back);
  return 0;
}
