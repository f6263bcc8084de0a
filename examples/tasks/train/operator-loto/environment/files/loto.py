def lora(leto, zoku):
    return leto // zoku
