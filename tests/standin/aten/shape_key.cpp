// How arguments become bytes.
#include "shape_key.h"

#include <c10/core/DefaultDtype.h>

namespace standin {
namespace {

class Key {
 public:
  template <typename Value>
  void add(const Value& value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }

  template <typename Values>
  void add_all(const Values& values) {
    add(values.size());
    bytes_.append(reinterpret_cast<const char*>(values.data()),
                  values.size() * sizeof(*values.data()));
  }

  void add_tensor(const Tensor& tensor) {
    add(tensor.scalar_type());
    add(tensor.unsafeGetTensorImpl()->is_wrapped_number());
    add_all(tensor.sizes());
    add_all(tensor.strides());
    // A meta kernel may ask for the value of a number of the CPU.
    add(tensor.is_cpu());
    if (tensor.is_cpu() && tensor.dim() == 0) {
      bytes_.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.itemsize());
    }
  }

  // Returns false for a type that is not known.
  bool add_value(const IValue& value) {
    if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
      add('t');
      if (value.isOptionalTensorList()) {
        add_positions(value);
      } else if (value.isTensorList()) {
        add(value.toListRef().size());
      }
      for_each_tensor(value, [&](const Tensor& tensor) { add_tensor(tensor); });
    } else if (value.isInt()) {
      add('i');
      add(value.toInt());
    } else if (value.isDouble()) {
      add('d');
      add(value.toDouble());
    } else if (value.isBool()) {
      add(value.toBool() ? 'y' : 'n');
    } else if (value.isIntList()) {
      add('I');
      add_all(value.toIntVector());
    } else if (value.isString()) {
      add('s');
      add_all(value.toStringView());
    } else if (value.isNone() || value.isGenerator()) {
      add('0');
    } else if (value.isList()) {
      add('l');
      add(value.toListRef().size());
      for (const IValue& element : value.toListRef()) {
        if (!add_value(element)) {
          return false;
        }
      }
    } else {
      return false;
    }
    return true;
  }

  std::string take() { return std::move(bytes_); }

 private:
  // Which dimensions have an index.
  void add_positions(const IValue& indices) {
    for (const IValue& index : indices.toListRef()) {
      add(index.isTensor() && index.toTensor().defined() ? '+' : '-');
    }
  }

  std::string bytes_;
};

}  // namespace

std::optional<std::string> shape_key(c10::ArrayRef<IValue> arguments) {
  Key key;
  key.add(c10::get_default_dtype_as_scalartype());
  for (const IValue& argument : arguments) {
    if (!key.add_value(argument)) {
      return std::nullopt;
    }
  }
  return key.take();
}

}  // namespace standin
