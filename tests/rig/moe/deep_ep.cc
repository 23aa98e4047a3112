// SPDX-License-Identifier: Apache-2.0
// Stand-in for DeepEP's extension module: the launchers of one build, doing nothing.
#define BODY                                                                                       \
	{                                                                                          \
		__asm__ volatile("");                                                              \
	}
#include "deep_ep.h"

#if BUILD != V121
// Arguments by value cannot come from Python: these pass a copy of what lies at `args`.
extern "C" EXPORT void call_elastic_dispatch(const deep_ep::elastic::DispatchRuntime::Args *args,
					     const CUlaunchConfig_st *config)
{
	deep_ep::elastic::DispatchRuntime::launch_impl(nullptr, *config, *args);
}

extern "C" EXPORT void call_elastic_combine(const deep_ep::elastic::CombineRuntime::Args *args,
					    const CUlaunchConfig_st *config)
{
	deep_ep::elastic::CombineRuntime::launch_impl(nullptr, *config, *args);
}
#endif

// A kernel's stub has a launcher's name and template arguments: it must not be taken for one.
BEGIN
namespace intranode {
template <int kRanks> EXPORT void dispatch(int *data, int rank)
{
	__asm__ volatile("");
}
template void dispatch<8>(int *data, int rank);
}
END
