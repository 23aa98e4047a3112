#include "state.h"

#include <string.h>
#include <sys/stat.h>

enum { MAX_ENTRIES = 2048 };

static struct entry {
  char key[64], value[192];
} entries[MAX_ENTRIES];
static int count;
static struct timespec readAt;
static off_t readSize;

static void parse(FILE *in) {
  char line[256];
  count = 0;
  while (fgets(line, sizeof(line), in) && count < MAX_ENTRIES) {
    char *equals = strchr(line, '=');
    if (line[0] == '#' || !equals) continue;
    *equals = 0;
    line[strcspn(line, " \t")] = 0;
    char *value = equals + 1 + strspn(equals + 1, " \t");
    value[strcspn(value, "\r\n")] = 0;
    snprintf(entries[count].key, sizeof(entries[count].key), "%s", line);
    snprintf(entries[count].value, sizeof(entries[count].value), "%s", value);
    count++;
  }
}

void stateRefresh(void) {
  struct stat info;
  const char *path = getenv("RIG_NVML_STATE");
  if (!path || stat(path, &info)) {
    count = 0;
    readAt = (struct timespec){0, 0};
    return;
  }
  bool same = info.st_mtim.tv_sec == readAt.tv_sec && info.st_mtim.tv_nsec == readAt.tv_nsec &&
              info.st_size == readSize;
  FILE *in = same ? NULL : fopen(path, "r");
  if (!in) return;
  parse(in);
  fclose(in);
  readAt = info.st_mtim;
  readSize = info.st_size;
}

/* The last line with a key wins. */
static const char *find(const char *key) {
  for (int i = count - 1; i >= 0; i--) {
    if (!strcmp(entries[i].key, key)) return entries[i].value;
  }
  return NULL;
}

int stateCount(void) {
  const char *text = find("count");
  int gpus = text ? atoi(text) : rigGpuCount();
  return gpus < 0 ? 0 : gpus > RIG_MAX_GPUS ? RIG_MAX_GPUS : gpus;
}

int stateFailure(const char *function) {
  char key[64];
  snprintf(key, sizeof(key), "fail.%s", function);
  const char *text = find(key);
  return text ? atoi(text) : 0;
}

const char *stateText(int gpu, const char *key) {
  char full[64];
  snprintf(full, sizeof(full), "gpu%d.%s", gpu, key);
  const char *text = find(full);
  if (text) return text;
  snprintf(full, sizeof(full), "gpu*.%s", key);
  return find(full);
}

unsigned long long stateNumber(int gpu, const char *key, unsigned long long fallback) {
  const char *text = stateText(gpu, key);
  return text ? strtoull(text, NULL, 0) : fallback;
}
