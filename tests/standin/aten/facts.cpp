// How an operator's schema is read.
#include "facts.h"

#include <ATen/core/function_schema.h>
#include <ATen/core/jit_type.h>

#include <set>

namespace standin {
namespace {

// Their shapes depend on values, too, though they lack the tag.
const std::set<std::string> kUntagged = {"aten::_ctc_loss.Tensor", "aten::_unique",
                                         "aten::index.Tensor_out"};

// Their meta kernels give CUDA's shapes, where the CPU's backward expects others.
const std::set<std::string> kWithoutMeta = {"aten::_embedding_bag",
                                            "aten::_embedding_bag_forward_only"};

bool is_written_argument(const c10::Argument& argument) {
  const c10::AliasInfo* const info = argument.alias_info();
  return info != nullptr && info->isWrite();
}

bool is_number(const c10::Argument& result) {
  const c10::TypeKind kind = result.type()->kind();
  return kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType;
}

bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

}  // namespace

bool has_kernel(const c10::OperatorHandle& op, c10::DispatchKey key) {
  return op.hasKernelForDispatchKey(key) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
}

Facts::Facts(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  name = c10::toString(op.operator_name());
  num_arguments = schema.arguments().size();
  is_foreach = starts_with(name, "aten::_foreach_");
  is_index_put = starts_with(name, "aten::index_put") ||
                 starts_with(name, "aten::_index_put_impl") ||
                 starts_with(name, "aten::_unsafe_index_put");
  is_random = op.hasTag(at::Tag::nondeterministic_seeded);
  has_shapes_of_cuda = kWithoutMeta.count(name) != 0;
  is_pointwise = op.hasTag(at::Tag::pointwise);
  is_dynamic = op.hasTag(at::Tag::dynamic_output_shape) ||
               op.hasTag(at::Tag::data_dependent_output) || kUntagged.count(name) != 0;

  for (size_t i = 0; i < num_arguments; ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    argument_names.push_back(argument.name());
    is_written.push_back(is_written_argument(argument));
    if (argument.type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()))) {
      generator = static_cast<int>(i);
    }
  }
  for (const c10::Argument& result : schema.returns()) {
    has_numbers |= is_number(result);
  }
}

}  // namespace standin
