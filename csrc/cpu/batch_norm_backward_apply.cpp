// batch_norm_backward_apply on the CPU: one pass that reads dy and x and writes dx.

#include "../common/allocate.h"
#include "../common/formulas.h"
#include "../common/operators.h"
#include "activations.h"
#include "channel_vector.h"
#include "dispatch.h"
#include "elementwise.h"

namespace syncbn::cpu {
namespace {

// The work for each channel. Each pointer except `sums` is an array of one value per channel.
struct PerChannel {
  int64_t channels = 0;
  const double* means = nullptr;
  const double* invstds = nullptr;
  const double* weights = nullptr;
  const double* sums = nullptr;  // of dz, then of dz * xhat
  double count = 0;
  bool in_float = false;  // the type of the element-wise computation
  GradInput<double*> constants = {};

  template <typename Isa>
  static SYNCBN_INLINE void run(const PerChannel* shared) {
    const PerChannel p = *shared;  // a local copy, which stores cannot change
    SYNCBN_INDEPENDENT
    for (int64_t c = 0; c < p.channels; ++c) {
      const double center = p.in_float ? static_cast<float>(p.means[c]) : p.means[c];
      const GradInput<double> constants =
          grad_input_constants(p.means[c], center, p.invstds[c], p.weights[c], p.sums[c],
                               p.sums[p.channels + c], p.count);
      p.constants.center[c] = constants.center;
      p.constants.slope[c] = constants.slope;
      p.constants.shift[c] = constants.shift;
      p.constants.scale[c] = constants.scale;
    }
  }
};

}  // namespace

BackwardApplyResults batch_norm_backward_apply(const BackwardArguments& a) {
  const Geometry geometry = check_backward_apply(a);
  const Tensor& input = a.input;
  const int64_t channels = geometry.channels;
  const ActivationChoice choice = check_activation_gradient(a, geometry);
  const uint8_t* const mask_data = check_mask(a.mask, input, geometry);

  ChannelArrays arrays(/*capacity=*/6, channels);
  PerChannel work;
  work.channels = channels;
  work.means = static_cast<const double*>(a.mean.const_data_ptr());
  work.invstds = static_cast<const double*>(a.invstd.const_data_ptr());
  work.weights = arrays.load(a.weight, 1);
  work.sums = static_cast<const double*>(required(a.sums).const_data_ptr());
  if (a.expectation.present) {
    check_status(read_status(work.sums + 2 * channels, a.expectation));
  }
  work.count = std::max(*static_cast<const double*>(required(a.count).const_data_ptr()), 1.0);
  work.in_float = input.scalar_type() != ScalarType::Double;
  work.constants.center = arrays.add();
  work.constants.slope = arrays.add();
  work.constants.shift = arrays.add();
  work.constants.scale = arrays.add();
  dispatch_isa<PerChannel>(&work);
  double* const forward_shift = arrays.add();
  if (a.constants.has_value()) {
    const auto* values = static_cast<const double*>(a.constants->const_data_ptr());
    std::copy(values + channels, values + 2 * channels, forward_shift);
  }
  Tensor grad_input = allocate_like(input);

  const DType dtype = to_dtype(input.scalar_type());
  dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* dy = static_cast<const T*>(a.grad_output.const_data_ptr());
    const auto* x = static_cast<const T*>(input.const_data_ptr());
    auto* dx = static_cast<T*>(grad_input.mutable_data_ptr());
    dispatch_activation<compute_t<T>>(choice, dtype, [&](auto act) {
      using Act = decltype(act);
      if constexpr (std::is_same_v<Act, NoActivation>) {
        elementwise<GradInput, T>(geometry, mask_data, {dy, x}, dx, work.constants);
      } else {
        elementwise<GradInputWithEpilogue<Act>::template Formula, T>(
            geometry, mask_data, {dy, x}, dx, {work.constants, forward_shift, act});
      }
    });
  });
  return {grad_input};
}

}  // namespace syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  m.impl("batch_norm_backward_apply",
         &syncbn::boxed<syncbn::read_backward_apply, syncbn::cpu::batch_norm_backward_apply>);
}
