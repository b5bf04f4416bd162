// The Python module syncbn._C. Importing it registers the schemas and the CPU operators with
// torch's dispatcher. Its one function describes the build; no tensor passes through the module.

#include <pybind11/pybind11.h>

#include "cpu/simd.h"

namespace {

pybind11::dict build_info() {
  pybind11::dict info;
  info["version"] = SYNCBN_VERSION;
  info["oldest_torch"] = SYNCBN_OLDEST_TORCH;
  info["built_with_torch"] = SYNCBN_BUILT_WITH_TORCH;
  info["cuda_architectures"] = SYNCBN_CUDA_ARCHITECTURES;  // empty: no CUDA operators
#if defined(__x86_64__) && defined(__GNUC__)
  info["instruction_sets"] = "x86-64 baseline, AVX2 and AVX-512, chosen at run time";
#else
  info["instruction_sets"] = "the compiler's baseline";
#endif
  info["instruction_set"] = syncbn::cpu::instruction_set();
#if defined(__clang__)
  info["compiler"] = "clang " __clang_version__;
#elif defined(__GNUC__)
  info["compiler"] = "gcc " __VERSION__;
#endif
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Operators of syncbn, registered as torch.ops.syncbn.*";
  m.def("build_info", &build_info, "What this binary was built from and for.");
}
