#%Module
# Environment Modules: hpctrain as `make install` has put it into PREFIX, three folders above this file.

proc ModulesHelp {} {
    puts stderr {Distributed PyTorch training from containers.
    sbatch $HPCTRAIN_ROOT/launch/apptainer_ddp.sh train_ddp   train with a bundled trainer, from any folder
    sbatch $HPCTRAIN_ROOT/launch/apptainer_ddp.sh ./mine.py   run your own script
    hpctrain --help                                           commands in the image
    $HPCTRAIN_ROOT/docs                                       the pages}
}
module-whatis {distributed PyTorch training from containers}
conflict hpctrain

set file [file normalize $ModulesCurrentModulefile]
set prefix [file dirname [file dirname [file dirname $file]]]
set root [file join $prefix hpctrain [file tail $file]]
setenv HPCTRAIN_ROOT $root
prepend-path PATH [file join $root bin]
