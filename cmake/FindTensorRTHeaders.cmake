# SPDX-License-Identifier: Apache-2.0
#
# Defines TensorRT::headers. In order: -DTRTLLM_MHC_TENSORRT_INCLUDE, the environment's TENSORRT_INCLUDE, an installed
# TensorRT, a TensorRT that scripts/fetch_tensorrt.sh laid out in .trt, and last the headers that the same script fetches
# into the build folder. Nothing links against TensorRT, so one set of headers serves every TensorRT 10 and 11.
set(TRTLLM_MHC_TENSORRT_INCLUDE "" CACHE PATH "Folder that holds NvInfer.h")

set(mhc_named_include "${TRTLLM_MHC_TENSORRT_INCLUDE}")
if(mhc_named_include STREQUAL "" AND DEFINED ENV{TENSORRT_INCLUDE})
  set(mhc_named_include "$ENV{TENSORRT_INCLUDE}")
endif()

if(NOT mhc_named_include STREQUAL "")
  if(NOT EXISTS "${mhc_named_include}/NvInfer.h")
    message(FATAL_ERROR "No NvInfer.h in the TensorRT include folder that was named: ${mhc_named_include}")
  endif()
  set(TensorRTHeaders_INCLUDE_DIR "${mhc_named_include}")
else()
  file(GLOB mhc_fetched_includes "${CMAKE_CURRENT_SOURCE_DIR}/.trt/*/include")
  find_path(TensorRTHeaders_INCLUDE_DIR NvInfer.h
    HINTS ENV TENSORRT_ROOT ENV TRT_ROOT
    PATHS /usr/local/tensorrt /opt/tensorrt ${mhc_fetched_includes} "${CMAKE_BINARY_DIR}/tensorrt/include"
    PATH_SUFFIXES include include/x86_64-linux-gnu)
  if(NOT TensorRTHeaders_INCLUDE_DIR)
    find_package(Python 3.11 COMPONENTS Interpreter REQUIRED)
    message(STATUS "No TensorRT headers on this machine: fetching them")
    execute_process(
      COMMAND bash "${CMAKE_CURRENT_SOURCE_DIR}/scripts/fetch_tensorrt.sh" headers "${CMAKE_BINARY_DIR}/tensorrt"
        "${Python_EXECUTABLE}"
      RESULT_VARIABLE mhc_fetch_status)
    if(NOT mhc_fetch_status EQUAL 0)
      message(FATAL_ERROR
        "No TensorRT headers (NvInfer.h), and fetching them failed. With network access, run\n"
        "  ${CMAKE_CURRENT_SOURCE_DIR}/scripts/fetch_tensorrt.sh headers ${CMAKE_CURRENT_SOURCE_DIR}/.trt/headers\n"
        "or name the folder of an installed TensorRT: pip install . "
        "--config-settings=cmake.define.TRTLLM_MHC_TENSORRT_INCLUDE=/path/to/include")
    endif()
    find_path(TensorRTHeaders_INCLUDE_DIR NvInfer.h PATHS "${CMAKE_BINARY_DIR}/tensorrt/include" NO_DEFAULT_PATH)
  endif()
endif()

if(TensorRTHeaders_INCLUDE_DIR)
  file(STRINGS "${TensorRTHeaders_INCLUDE_DIR}/NvInferVersion.h" mhc_version_lines REGEX "#define (NV_TENSORRT|TRT)_(MAJOR|MINOR)")
  foreach(part MAJOR MINOR)
    # 10.14 and newer define NV_TENSORRT_* through TRT_*_ENTERPRISE.
    if(mhc_version_lines MATCHES "${part}(_ENTERPRISE)? ([0-9]+)")
      set(mhc_header_${part} ${CMAKE_MATCH_2})
    endif()
  endforeach()
  set(TensorRTHeaders_VERSION "${mhc_header_MAJOR}.${mhc_header_MINOR}")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(TensorRTHeaders
  REQUIRED_VARS TensorRTHeaders_INCLUDE_DIR VERSION_VAR TensorRTHeaders_VERSION)
if(TensorRTHeaders_FOUND AND NOT TARGET TensorRT::headers)
  add_library(TensorRT::headers INTERFACE IMPORTED)
  target_include_directories(TensorRT::headers SYSTEM INTERFACE "${TensorRTHeaders_INCLUDE_DIR}")
endif()
