// Arguments go to the host as tensors over the same memory; results come back under the names that they had.

#include "call.h"

#include <algorithm>
#include <cstring>
#include <sstream>

namespace gaudi_sim {

std::string printed(const c10::IValue& value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

void Call::to_host(c10::IValue& value, bool is_generator, bool is_operand) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    if (on_device(tensor)) {
      value = c10::IValue(twin(tensor));
    } else {
      keep(tensor);
    }
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(on_device(tensor) ? twin(tensor) : keep(tensor));
    }
    value = c10::IValue(std::move(list));
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      if (tensor) {
        has_mask_ = has_mask_ || tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte;
        list.push_back(on_device(*tensor) ? twin(*tensor) : keep(*tensor));
      } else {
        list.push_back(std::nullopt);
        add(0);
      }
    }
    value = c10::IValue(std::move(list));
  } else if (value.isDevice()) {
    if (value.toDevice().type() == c10::DeviceType::HPU) {
      value = c10::IValue(c10::Device(c10::DeviceType::CPU));
    }
  } else if (value.isGenerator()) {
    value = c10::IValue(host_generator(value.toGenerator()));
  } else if (value.isStorage()) {
    auto storage = value.toStorage();
    if (storage.device_type() == c10::DeviceType::HPU) {
      storages_.push_back(storage);
      value = c10::IValue(block_of(storage.unsafeGetStorageImpl()).host);
    }
  } else if (is_generator && value.isNone()) {
    value = c10::IValue(host_generator(default_generator()));
  } else if (signature_ != nullptr) {
    add(value, is_operand);
  }
}

void Call::follow() {
  for (auto& [device, host] : pairs_) {
    auto* to = device.unsafeGetTensorImpl();
    const auto* from = host.unsafeGetTensorImpl();
    auto* storage = to->unsafe_storage().unsafeGetStorageImpl();
    auto* from_storage = from->unsafe_storage().unsafeGetStorageImpl();
    if (block_of(storage).host.unsafeGetStorageImpl() != from_storage) {
      to->set_storage_keep_dtype(storage_over(from->unsafe_storage()));
    } else {
      follow_host(storage);
    }
    if (to->sizes() != from->sizes() || to->strides() != from->strides() ||
        to->storage_offset() != from->storage_offset()) {
      to->set_sizes_and_strides(from->sizes(), from->strides(), from->storage_offset());
    }
  }
}

c10::IValue Call::to_device(c10::IValue&& value) {
  const auto converted = [&](const at::Tensor& result) {
    auto tensor = from_host(result);
    if (signature_ != nullptr && on_device(tensor)) {
      add_result(tensor);
    }
    return tensor;
  };
  if (value.isTensor()) {
    return c10::IValue(converted(value.toTensor()));
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(converted(tensor));
    }
    return c10::IValue(std::move(list));
  }
  return std::move(value);
}

bool Call::mixed() const {
  return has_host_operand_ && !pairs_.empty();
}

bool Call::has_float64() const {
  return std::any_of(pairs_.begin(), pairs_.end(), [](const auto& pair) {
    const auto dtype = pair.first.scalar_type();
    return dtype == at::kDouble || dtype == at::kComplexDouble;
  });
}

bool Call::is_of_int64() const {
  return !pairs_.empty() && pairs_.front().first.scalar_type() == at::kLong;
}

at::Tensor Call::twin(const at::Tensor& tensor) {
  add(tensor);
  for (const auto& [device, host] : pairs_) {
    if (device.is_same(tensor)) {
      return host;
    }
  }
  pairs_.emplace_back(tensor, host_tensor(tensor));
  return pairs_.back().second;
}

const at::Tensor& Call::keep(const at::Tensor& tensor) {
  if (tensor.defined()) {
    add(tensor);
    kept_.push_back(tensor);
    has_host_operand_ = has_host_operand_ || tensor.dim() > 0;
  }
  return tensor;
}

void Call::add(const at::Tensor& tensor) {
  if (signature_ != nullptr) {
    signature_->add(tensor);
  }
}

void Call::add(uint64_t value) {
  if (signature_ != nullptr) {
    signature_->add(value);
  }
}

void Call::add(const c10::IValue& value, bool is_operand) {
  if (value.isInt() || value.isBool()) {
    add(is_operand ? 1 : 2 + static_cast<uint64_t>(value.isInt() ? value.toInt() : int64_t{value.toBool()}));
  } else if (value.isIntList()) {
    for (const int64_t number : value.toIntVector()) {
      add(static_cast<uint64_t>(number));
    }
    add(3);
  } else if (value.isDouble()) {
    const double number = value.toDouble();
    uint64_t bits = 0;
    std::memcpy(&bits, &number, sizeof bits);
    add(is_operand ? 4 : bits);
  } else if (value.isNone()) {
    add(5);
  } else if (!is_operand) {
    add(std::hash<std::string>()(printed(value)));
  }
}

// The device storage over a host storage: an argument's, or a new one.
c10::Storage Call::storage_over(const c10::Storage& host) {
  for (const auto& [device, twin] : pairs_) {
    auto* storage = device.storage().unsafeGetStorageImpl();
    if (block_of(storage).host.is_alias_of(host)) {
      return device.storage();
    }
  }
  for (const auto& storage : storages_) {
    if (block_of(storage.unsafeGetStorageImpl()).host.is_alias_of(host)) {
      return storage;
    }
  }
  storages_.push_back(device_storage(host));
  return storages_.back();
}

at::Tensor Call::from_host(const at::Tensor& tensor) const {
  const auto is_same = [&](const at::Tensor& argument) { return argument.is_same(tensor); };
  if (!tensor.defined() || !tensor.device().is_cpu() || std::any_of(kept_.begin(), kept_.end(), is_same)) {
    return tensor;
  }
  for (const auto& [device, host] : pairs_) {
    if (host.is_same(tensor)) {
      return device;
    }
  }
  if (tensor.layout() == c10::kStrided && tensor.has_storage()) {
    for (const auto& [device, host] : pairs_) {
      if (host.storage().is_alias_of(tensor.storage())) {
        return over(device.storage(), tensor, c10::DispatchKey::HPU);
      }
    }
  }
  return device_tensor(tensor);
}

}  // namespace gaudi_sim
