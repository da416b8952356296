-- Lmod: hpctrain as `make install` has put it into PREFIX, three folders above this file.
help([[
Distributed PyTorch training from containers.
    sbatch $HPCTRAIN_ROOT/launch/apptainer_ddp.sh train_ddp   train with a bundled trainer, from any folder
    sbatch $HPCTRAIN_ROOT/launch/apptainer_ddp.sh ./mine.py   run your own script
    hpctrain --help                                           commands in the image
    $HPCTRAIN_ROOT/docs                                       the pages
]])
whatis("Name: hpctrain")
whatis("Version: " .. myModuleVersion())
whatis("Description: distributed PyTorch training from containers")
conflict(myModuleName())

local root = pathJoin(myFileName():match("^(.*)/modulefiles/"), myModuleName(), myModuleVersion())
setenv("HPCTRAIN_ROOT", root)
prepend_path("PATH", pathJoin(root, "bin"))
