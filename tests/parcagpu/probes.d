provider parcagpu {
  probe cuda_correlation(uint32_t correlation, int callback, const char *name);
  probe kernel_executed(uint64_t start, uint64_t end, uint32_t correlation, uint32_t device,
                        uint32_t stream, uint32_t graph, uint64_t node, const char *name);
};
