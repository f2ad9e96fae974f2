# SPDX-License-Identifier: Apache-2.0
#
# Sets CMAKE_CUDA_COMPILER before enable_language(CUDA). In order: what the user names (-DCMAKE_CUDA_COMPILER, CUDACXX), an
# installed toolkit that is new enough, the compiler wheels from PyPI in the environment of the Python that runs the build.
set(MHC_OLDEST_NVCC 12.9) # the first that knows sm_103a

function(mhc_nvcc_is_new_enough accepted candidate)
  execute_process(COMMAND "${candidate}" --version OUTPUT_VARIABLE banner ERROR_QUIET)
  set(release unknown)
  if(banner MATCHES "release ([0-9]+\\.[0-9]+)")
    set(release ${CMAKE_MATCH_1})
  endif()
  if(release STREQUAL unknown OR release VERSION_LESS MHC_OLDEST_NVCC)
    message(STATUS "Passing over ${candidate}: CUDA ${release}, ${MHC_OLDEST_NVCC} or newer is needed")
    set(${accepted} FALSE PARENT_SCOPE)
  endif()
endfunction()

if(NOT CMAKE_CUDA_COMPILER AND DEFINED ENV{CUDACXX})
  set(CMAKE_CUDA_COMPILER "$ENV{CUDACXX}")
endif()

if(NOT CMAKE_CUDA_COMPILER)
  find_program(MHC_TOOLKIT_NVCC nvcc
    HINTS "${CUDAToolkit_ROOT}" ENV CUDAToolkit_ROOT ENV CUDA_HOME ENV CUDA_PATH
    PATHS /usr/local/cuda
    PATH_SUFFIXES bin
    VALIDATOR mhc_nvcc_is_new_enough)
  if(MHC_TOOLKIT_NVCC)
    set(CMAKE_CUDA_COMPILER "${MHC_TOOLKIT_NVCC}")
  else()
    find_package(Python 3.11 COMPONENTS Interpreter REQUIRED)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c "import sys; print(*sys.path, sep=';')"
      OUTPUT_VARIABLE site_folders OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    find_program(MHC_WHEEL_NVCC nvcc
      HINTS ${site_folders}
      PATH_SUFFIXES nvidia/cu13/bin
      VALIDATOR mhc_nvcc_is_new_enough
      NO_DEFAULT_PATH)
    if(NOT MHC_WHEEL_NVCC)
      message(FATAL_ERROR
        "No CUDA compiler: looked for nvcc ${MHC_OLDEST_NVCC} or newer in CUDACXX, CUDA_HOME, PATH, /usr/local/cuda and the "
        "packages of ${Python_EXECUTABLE}. Install a CUDA toolkit, or run\n"
        "  ${Python_EXECUTABLE} -m pip install 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' "
        "'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*' 'nvidia-nvvm==13.0.*'")
    endif()
    set(CMAKE_CUDA_COMPILER "${MHC_WHEEL_NVCC}")
  endif()
endif()

# The wheels' libraries are in lib, which their nvcc.profile does not name.
cmake_path(GET CMAKE_CUDA_COMPILER PARENT_PATH nvcc_folder)
cmake_path(GET nvcc_folder PARENT_PATH nvcc_root)
if(EXISTS "${nvcc_root}/lib/libcudart_static.a" AND NOT EXISTS "${nvcc_root}/lib64")
  set(library_folder "-L${nvcc_root}/lib")
  if(library_folder MATCHES " ")
    set(library_folder "\"${library_folder}\"") # CMake 3.25 does not understand quotes here
  endif()
  string(APPEND CMAKE_CUDA_FLAGS_INIT " ${library_folder}")
  string(STRIP "${CMAKE_CUDA_FLAGS_INIT}" CMAKE_CUDA_FLAGS_INIT)
endif()
message(STATUS "CUDA compiler: ${CMAKE_CUDA_COMPILER}")
