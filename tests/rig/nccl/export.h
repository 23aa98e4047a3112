/* NCCL's export pattern: a strong pncclX and a weak ncclX at the same address. Two probes, one on
 * each name, would count every call twice; this must stay so here. */
#ifndef RIG_NCCL_EXPORT_H
#define RIG_NCCL_EXPORT_H

#define EXPORT(type, name, ...)                                                                   \
  __attribute__((weak, visibility("default"), alias("p" #name))) type name(__VA_ARGS__);          \
  __attribute__((visibility("default"))) type p##name(__VA_ARGS__)

#define RIG_EXPORT(name, ...) EXPORT(ncclResult_t, name, __VA_ARGS__)

/* A compiler gives a function that calls nothing no frame, so its entry would be no push: a saved
 * register has to make one. */
#ifdef __x86_64__
#define PUSH_AT_ENTRY() __asm__ volatile("" ::: "rbx")
#else
#define PUSH_AT_ENTRY() (void)0
#endif

#endif
